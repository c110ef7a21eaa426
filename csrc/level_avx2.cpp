#define PARTITA_LEVEL avx2
#include "level.hpp"
