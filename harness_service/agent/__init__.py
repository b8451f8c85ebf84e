"""The agent: what asks the model and calls the tools. Decisions are in ``core``; here they are carried out."""
