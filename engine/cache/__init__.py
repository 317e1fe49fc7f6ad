"""The prompt cache: states kept after prompt rows, found again by what the rows say."""
