"""From a journal to rows: is a script faster, or is it noise?

In: a Measured. Out: a Row for each run, with its medians, its factor over what it is compared to,
that factor's interval, and whether it is significant.
"""
