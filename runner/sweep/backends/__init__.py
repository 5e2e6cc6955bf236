"""Where the jobs of a sweep run: local processes, submitit (Slurm), Ray. `base` is the interface. Imports: launch, common."""
