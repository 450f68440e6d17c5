"""How a trainer calls SGLang's and vLLM's APIs: over HTTP, through Ray or in its own process."""
