"""Lapwing's parts as parts of other libraries. Each file needs its library, and says so: none is imported here."""
