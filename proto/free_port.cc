#include "proto/free_port.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace signpost {

uint16_t FreePort() {
  sockaddr_in address = {.sin_family = AF_INET, .sin_port = 0, .sin_addr = {INADDR_ANY}};
  socklen_t size = sizeof(address);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bind(listener, reinterpret_cast<sockaddr*>(&address), size);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  close(listener);
  return ntohs(address.sin_port);
}

}  // namespace signpost
