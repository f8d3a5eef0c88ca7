"""elasticjob in Hugging Face's Trainer and in PyTorch Lightning. Import the module of the framework that you use."""
