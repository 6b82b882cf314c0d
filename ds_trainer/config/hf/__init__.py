"""transformers' TrainingArguments, both ways. Pure."""
