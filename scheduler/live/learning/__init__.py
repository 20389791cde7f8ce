"""What a gateway has learnt of models, prompts, traffic and moves."""
