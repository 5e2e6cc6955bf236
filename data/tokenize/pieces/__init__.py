"""Fast encoding of plain text: a text is cut where its pre-tokens end, and each piece is encoded once. May import the tokenizers library and numpy."""
