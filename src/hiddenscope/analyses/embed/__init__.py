"""Which vector stands for a text?"""
