"""From data files to batches: rows -> examples -> token ids -> token store -> batches.

No module imports runner/ or models/.

Modules import only what is above them in this list:

    common                     errors, files, locks
    types.py                   bad rows; encoding settings and encoded rows
    background.py              waits for threads and processes, and processes that tokenize or prepare batches
    sources/                   files -> rows (pyarrow, datasets)
    schemas/                   rows -> examples: text, conversation, preference
    config.py                  settings of the group `data`
    tokenize/                  examples -> token ids and loss masks (tokenizers, jinja2)
    store/                     token ids on disk, built once per file and encoding
    batching/                  mixing, order, packing, batches (torch)
"""
