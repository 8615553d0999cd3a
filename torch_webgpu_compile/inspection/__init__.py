"""Compiler and GPU for a person: reports, profiles, the doctor."""
