"""Limits on what files and clients of another can make this program do: parsers of JSON and YAML, memory, connections.

Imports the standard library, and yaml inside functions.
"""

# For the headers of a request, from the first byte, or from the connection if none comes; no byte moves the deadline.
# Connections that send them slowly, or none, would take all places.
HEADER_SECONDS = 20
