"""From a journal's Measurement to a Row for each run: is a script faster, or is it noise?"""
