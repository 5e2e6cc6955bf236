"""The commands (`runner/*.py`) and their parts, a folder each. A command may import all folders; no folder imports a command."""
