"""How a trainer calls an engine's API: HTTP, Ray, in the process; SGLang's and vLLM's forms."""
