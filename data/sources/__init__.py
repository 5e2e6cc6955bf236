"""Data files to rows: which files a path names, the format of each, and its rows one after another as JSON objects (dict).

files.py is the entry (resolve_sources, Source); json_text.py and tables.py read the formats, huggingface.py finds data sets of the Hub.
Memory does not grow with the size of a file. May import: common, data.errors, pyarrow and datasets (inside functions).
"""
