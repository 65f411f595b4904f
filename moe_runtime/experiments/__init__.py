"""Whole runs of the methods: from folders and rows, as the command line does them, and from recipes to a paper's tables."""
