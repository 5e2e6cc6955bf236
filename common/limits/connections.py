"""How long a client of a server of this program may take for the headers of a request: connections that send them
slowly, or none, would take all places.
"""

# from the first byte, or from the connection if none comes, to the end of the headers; no byte moves the deadline
HEADER_SECONDS = 20
