"""Sizes and exact index expressions: polynomials of symbols with floor divisions and remainders."""
