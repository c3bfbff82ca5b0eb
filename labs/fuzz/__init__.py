"""Hostile and damaged input, at length: `make fuzz`, or `python -m labs.fuzz --cases 1000`.

sandbox      one case in a process of its own, with limits on its time and memory
folders      model folders and GGUF files with absurd numbers, special files and damage
adapters     adapter folders with slow patterns, absurd ranks, odd tensors and odd bases
dictionaries  dictionaries of other libraries with odd configurations and damage
saved        single bits flipped in every kind of file that is saved, and in cached models;
             headers with other values in files that were sealed again
disk         a disk that becomes full while something is written
texts        mutated text files and compressed bombs
calls        public functions and methods with arguments of wrong types and values
sites        site strings
questions    one question of every kind, and all that a question may not change
interrupts   Ctrl-C at random moments and at random lines of hooks.py
requests     requests to the workbench that follow its OpenAPI document, and requests that break it
load         many clients of the workbench at once, while a model works
"""
