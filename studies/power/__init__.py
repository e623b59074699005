"""At which clocks kernels run by themselves, and where a power limit holds those of kernels and steps in a row.

`kernels` and `steps` measure on a GPU; `table` sets what they found beside the law of
`flopcast.roofline.step.power_limit`. `again`: steps profiled after a rest beside the same ones profiled while hot.
"""
