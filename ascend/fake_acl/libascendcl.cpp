// The library in one translation unit, which compiles in a third of the time.
#include "state.cpp"
#include "life.cpp"
#include "memory.cpp"
#include "stream.cpp"
#include "kernel.cpp"
#include "control.cpp"
