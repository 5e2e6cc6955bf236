"""External trackers, one module each: a config class registered in TRACKERS and the program that forwards metrics.
`tracker=x` selects the module x.
"""
