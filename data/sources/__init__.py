"""Data files to rows: which files a path names, the format of each, and its rows one after another as JSON objects
(dict).

splits.py is the entry for training (resolve_data_files), files.py for single files (open_entry, Source). detect.py and
byte_stream.py detect format and encoding, json_text.py and tables.py read the formats. Memory does not grow with the
size of a file. May import: common, data.types, pyarrow, charset_normalizer and datasets (inside functions).
"""
