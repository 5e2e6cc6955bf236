"""Process that loads one tokenizer, and encodes and decodes texts with it, within limits that the kernel holds:
`pattern_probe SECONDS < [tokenizer.json, texts]`.

tokenizer_limits.py starts it. It ends with code 0 if the texts are encoded, with 1 and an error on stderr, or by a
signal at a limit.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time

from tokenizers import Tokenizer as Engine

PROBE_MEMORY = 1 << 30  # bytes of the process


def probe_tokenizer() -> int:
    seconds = int(sys.argv[1])
    tokenizer_json, texts = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (PROBE_MEMORY, PROBE_MEMORY))
    seconds += math.ceil(time.process_time())  # those of the start do not count
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    try:
        engine = Engine.from_str(tokenizer_json)
        for text in texts:
            engine.encode(text, add_special_tokens=False)
            if engine.decoder is not None:
                engine.decoder.decode([text])
    except BaseException as error:  # a panic of the library is no Exception
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(probe_tokenizer())
