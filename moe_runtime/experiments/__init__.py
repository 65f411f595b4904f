"""Whole experiments: from a recipe, through stages of training, to a paper's tables."""
