#define PARTITA_LEVEL avx512
#include "level.hpp"
