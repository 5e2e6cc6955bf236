"""What a process that trains on a CPU sets for itself: memory allocator, threads, and how they wait."""
