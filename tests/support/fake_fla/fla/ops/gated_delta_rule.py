def chunk_gated_delta_rule(*args, **options):
    raise NotImplementedError("the stand-in computes nothing: use deterministic_mode")
