"""Which texts are nearest to this one?"""
