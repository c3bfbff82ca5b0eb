"""Figures for print: matplotlib draws the views as PNG, SVG and PDF."""
