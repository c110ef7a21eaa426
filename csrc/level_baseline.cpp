#define PARTITA_LEVEL baseline
#include "level.hpp"
