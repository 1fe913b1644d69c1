"""A training step on a GPU that isn't there: its memory and its time.

In: a script's name, its options and a card. Out: a Prediction, from results/reference/predict.json
or from a step that is traced.
"""
