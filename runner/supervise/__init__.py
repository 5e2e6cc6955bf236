"""`train.supervise=true`: watch a training, decide what its failures mean, restart it, and record every incident.
Imports no torch.
"""
