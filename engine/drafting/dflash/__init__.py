"""DFlash and DFlash2: drafters that guess a whole block of tokens in one pass, from the target's own hidden rows."""
