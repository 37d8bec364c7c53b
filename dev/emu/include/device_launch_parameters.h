// threadIdx and its like are in emu.h.
