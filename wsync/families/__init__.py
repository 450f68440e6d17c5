"""Model families: rules that name a trainer's parameters as Hugging Face checkpoints do."""
