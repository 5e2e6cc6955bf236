"""serve.py: a trained model behind the HTTP interface of OpenAI, to try it out and for evaluation harnesses."""
