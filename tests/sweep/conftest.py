from fake_jobs import fake_jobs, finished, finished_sweep, resume, sweep

__all__ = ["fake_jobs", "finished", "finished_sweep", "resume", "sweep"]
