"""The agent: what asks the model and calls the tools; the decisions that it carries out are in ``core``."""
