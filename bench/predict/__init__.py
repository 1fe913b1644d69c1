"""A training step on a GPU that isn't there, its memory and its time: a script's name, its options
and a card make a Prediction, which is stored (results/reference/predict.json) or traced."""
