"""What a run measures about itself that a user should act on: symptoms in its logged numbers and in its rows. Pure
functions; imports no torch.
"""
