"""Planted faults: does the suite find what it is there for?"""
