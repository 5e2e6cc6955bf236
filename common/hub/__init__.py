"""Names of models on the Hugging Face hub, and where its local cache has their files."""
