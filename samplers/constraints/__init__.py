"""Answers of a given form: regular expressions and JSON schemas as automata over tokens, kept while any position may be
written at any time."""
