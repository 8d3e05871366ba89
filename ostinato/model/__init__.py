"""One decoder for sampling and training: dense and mixture-of-experts, Hugging Face folders in and out."""
