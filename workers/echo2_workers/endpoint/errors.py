"""What the endpoint answers when it cannot do what was asked, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from echo2.errors import EnvironmentError_


class ApiError(EnvironmentError_):
    """One refused call. `param` names the field of the request that is at fault."""

    def __init__(
        self,
        text: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        super().__init__(text)

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }
