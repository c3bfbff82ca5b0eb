"""Which texts belong together?"""
