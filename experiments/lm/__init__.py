"""Language models grown in training: the study behind the recipes."""
