"""torchrun for warm_programs.py, which forks its ranks."""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
