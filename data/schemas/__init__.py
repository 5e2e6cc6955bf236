"""Row schemas: from a row of a data file to a text, a conversation or a preference, checked and in one form.

registry.py has the table of schemas; text.py and chat.py register the built-in ones, and a new module in this folder is
found without further registration. messages.py checks conversations, chat.py changes them at random.
May import: common, data.types, data.sources, numpy (inside functions).
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):  # each registers its schemas
    importlib.import_module(f"{__name__}.{_module.name}")
