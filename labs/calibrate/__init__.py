"""Calibrate: does every interval and every test hold at the level that it states? `make
calibrate` measures it.
"""
